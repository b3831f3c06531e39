"""The network faces: gRPC services and the tokenizer behind them."""
