// Temporal's server, its schema and its web UI in one program, for the local stack.
//
//	temporal-server serve -namespace NAME -retention-days N -ports FRONTEND,HISTORY,MATCHING,WORKER
//	temporal-server ui -port PORT -server HOST:PORT
//
// Both listen on loopback only. `serve` keeps everything in the Postgres server of RATCHET_DATABASE_URL, in two
// databases of its own. stack/temporal_server.py builds and runs this program.
package main

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
)

const loopback = "127.0.0.1"

func main() {
	if len(os.Args) < 2 {
		fail(fmt.Errorf("expected `serve` or `ui`"))
	}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	var err error
	switch os.Args[1] {
	case "serve":
		options := serveOptions{databaseURL: os.Getenv("RATCHET_DATABASE_URL")}
		flags.StringVar(&options.namespace, "namespace", "default", "namespace to register")
		flags.IntVar(&options.retentionDays, "retention-days", 30, "retention of a new namespace")
		ports := flags.String("ports", "", "ports of frontend, history, matching and worker")
		_ = flags.Parse(os.Args[2:])
		if options.ports, err = parsePorts(*ports); err == nil {
			err = serve(options)
		}
	case "ui":
		port := flags.Int("port", 0, "port to listen on")
		server := flags.String("server", "", "address of the frontend")
		_ = flags.Parse(os.Args[2:])
		err = serveUI(*port, *server)
	default:
		err = fmt.Errorf("%q: expected `serve` or `ui`", os.Args[1])
	}
	if err != nil {
		fail(err)
	}
}

func parsePorts(text string) ([4]int, error) {
	var ports [4]int
	words := strings.Split(text, ",")
	if len(words) != len(ports) {
		return ports, fmt.Errorf("-ports %q: expected four numbers with commas between them", text)
	}
	for index, word := range words {
		port, err := strconv.Atoi(word)
		if err != nil {
			return ports, fmt.Errorf("-ports %q: %w", text, err)
		}
		ports[index] = port
	}
	return ports, nil
}

func fail(err error) {
	fmt.Fprintf(os.Stderr, "temporal-server: %v\n", err)
	os.Exit(1)
}
