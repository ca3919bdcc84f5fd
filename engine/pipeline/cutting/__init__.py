"""An ordinary module cut into layers: its forward is followed once, and each layer repeats a stretch of it."""
