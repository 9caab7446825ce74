"""Shape and tensors of draft trees."""
