"""Parts that several integrations use: agreed stops, retention in folders of a framework, weights by name."""
