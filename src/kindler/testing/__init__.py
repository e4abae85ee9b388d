"""Contract suites: subclass one for a part of your own, and pytest checks that it keeps its promises."""
