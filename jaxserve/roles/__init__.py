"""Workers of the attention, ffn and colocated roles, their compiled programs and their
schedules."""
