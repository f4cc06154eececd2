"""What the pages show, as named types: a page's JSON twin is its model as JSON."""
