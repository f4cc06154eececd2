"""The content of the pages, as named types: a page's JSON twin is its model as JSON."""
