// Package option has the options of Google's clients, of which this server has none.
package option

import "golang.org/x/oauth2"

type ClientOption struct{}

func WithTokenSource(oauth2.TokenSource) ClientOption {
	return ClientOption{}
}
