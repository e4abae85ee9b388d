"""`zoo.feature`: sets of images, texts and arrays, and what is done to them before training."""
