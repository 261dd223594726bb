"""Jobs that make real data sets with datagen_ray; each runs as a script and as a Ray job."""
