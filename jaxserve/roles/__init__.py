"""What a worker plays: the programs of attention, ffn and colocated, and who runs them when."""
