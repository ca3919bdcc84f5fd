"""What a run says of itself: text, pictures, TensorBoard, a trace for Perfetto, the page of a sweep."""
