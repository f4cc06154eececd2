// Package workercomponent runs no workflows of scaled workers.
package workercomponent

import "go.uber.org/fx"

var Module = fx.Options()
