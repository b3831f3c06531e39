"""The one place where arrays cross meshes; knows nothing of attention and ffn."""
