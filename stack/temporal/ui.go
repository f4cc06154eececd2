package main

import (
	"github.com/temporalio/ui-server/v2/server"
	"github.com/temporalio/ui-server/v2/server/config"
	"github.com/temporalio/ui-server/v2/server/server_options"
)

// serveUI runs the web UI until it is ended by a signal.
func serveUI(port int, frontend string) error {
	return server.NewServer(server_options.WithConfigProvider(&config.Config{
		Host:                loopback,
		Port:                port,
		TemporalGRPCAddress: frontend,
		EnableUI:            true,
		CORS:                config.CORS{CookieInsecure: true},
		HideLogs:            true,
		DisableNewsFetch:    true,
	})).Start()
}
