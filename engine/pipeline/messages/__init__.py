"""What crosses from stage to stage: layouts, buffers, and the channels to the neighbours."""
