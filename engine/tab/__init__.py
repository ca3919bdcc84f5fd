"""The tab "Pipeline" of TensorBoard: a server of what event files hold (`plugin.py`) and a page (`page/index.js`)."""
