"""The ways in which messages cross, one file each."""
