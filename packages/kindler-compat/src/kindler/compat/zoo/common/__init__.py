"""Analytics Zoo's `zoo.common`."""
