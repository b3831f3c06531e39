"""Workers of the attention, ffn and colocated roles, their programs and their schedules."""
