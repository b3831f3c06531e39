"""The engine: requests, pages, the scheduler and the loop that turns step plans into tokens."""
