"""The network faces: gRPC and HTTP, the pages, metrics and access control."""
