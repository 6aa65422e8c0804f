"""The simulated allocator held against recordings of the real one, event by event."""
