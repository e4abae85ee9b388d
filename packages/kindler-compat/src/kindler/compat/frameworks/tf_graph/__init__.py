"""TensorFlow graphs: a loss tensor, placeholders and a session, as programs of TensorFlow 1 make them."""
