"""Router, dense FFN and experts; knows nothing of attention and link."""
