"""Settings to Job: model, data and loss are tried once, every program is proven."""
