"""A measured step run again on paper: what was observed of it, its replay, and the bars of its waterfall."""
