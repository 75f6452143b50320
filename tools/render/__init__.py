"""Text, HTML and charts from what commands have computed."""
