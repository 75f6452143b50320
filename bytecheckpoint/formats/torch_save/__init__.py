"""Files of torch.save: their archive, their pickle, and folders of one file per rank."""
