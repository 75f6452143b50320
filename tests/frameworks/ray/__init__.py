"""Ray Train itself: two workers on this machine."""
