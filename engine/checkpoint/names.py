"""Words that the command line and the run folder use for checkpoints."""

FOLDER = "checkpoints"  # of a run's folder
AUTO = "auto"  # of `resume`: go on where the run's own folder has a checkpoint, else begin
