// Package iterator has the end of a list of Google's clients, of which this server has none.
package iterator

import "io"

var Done = io.EOF
