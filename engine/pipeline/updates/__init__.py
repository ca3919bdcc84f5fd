"""What ends a step: gradients reduced over copies, clipped by the norm of the model, applied."""
