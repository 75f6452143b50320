"""Plain data of a state: how it is encoded, walked and merged."""
