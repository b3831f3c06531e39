"""Messages between independent runtimes, whatever transport carries their arrays."""
