"""What a run trains: models, losses and evaluation of text and of images."""
