"""The steps of a save: plan, prepare, write, report, commit."""
