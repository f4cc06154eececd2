"""Charts, time lines, histograms and shades of tokens: the shapes that pages draw of the facts of `reads`."""
