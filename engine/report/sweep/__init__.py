"""What came of a sweep: its jobs as rows of figures, and the page and the tables that are made of them."""
