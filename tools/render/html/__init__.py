"""Pages and pictures that need nothing but themselves."""
