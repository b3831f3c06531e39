"""Messages from attention to ffn and their answers: shapes, packing, places on the meshes."""
