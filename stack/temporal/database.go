package main

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"go.temporal.io/server/common/config"
	"go.temporal.io/server/common/log"
	"go.temporal.io/server/common/persistence/sql/sqlplugin/postgresql"
	"go.temporal.io/server/tools/common/schema"
	"go.temporal.io/server/tools/sql"
)

// The connections of one service to each of the two databases; four services run in this process.
const (
	coreConnections       = 12
	visibilityConnections = 4
)

const connectLimit = 30 * time.Second

// databases are the two stores of the server: workflows, and the list of workflows. `url` names the stack's database.
type databases struct {
	url        string
	core       *config.SQL
	visibility *config.SQL
}

// databasesOf derives both from a URL postgresql://USER:PASSWORD@HOST:PORT/NAME?sslmode=…; their names are
// NAME_temporal and NAME_temporal_visibility, so that installations that share a Postgres server do not meet.
func databasesOf(databaseURL string) (databases, error) {
	parsed, err := url.Parse(databaseURL)
	name := ""
	if err == nil {
		name = strings.TrimPrefix(parsed.Path, "/")
	}
	if err != nil || parsed.Hostname() == "" || name == "" {
		// The URL may hold a password, which must not reach a log.
		return databases{}, fmt.Errorf("RATCHET_DATABASE_URL: expected postgresql://USER:PASSWORD@HOST:PORT/NAME")
	}
	return databases{
		url:        databaseURL,
		core:       connectionTo(parsed, name+"_temporal", coreConnections),
		visibility: connectionTo(parsed, name+"_temporal_visibility", visibilityConnections),
	}, nil
}

func connectionTo(parsed *url.URL, name string, connections int) *config.SQL {
	port := parsed.Port()
	if port == "" {
		port = "5432"
	}
	password, _ := parsed.User.Password()
	attributes := map[string]string{}
	for key, values := range parsed.Query() {
		attributes[key] = values[0]
	}
	return &config.SQL{
		PluginName:        postgresql.PluginNamePGX,
		DatabaseName:      name,
		ConnectAddr:       net.JoinHostPort(parsed.Hostname(), port),
		ConnectProtocol:   "tcp",
		User:              parsed.User.Username(),
		Password:          password,
		ConnectAttributes: attributes,
		MaxConns:          connections,
		MaxIdleConns:      connections,
		MaxConnLifetime:   time.Hour,
	}
}

// prepare creates both databases if they are missing and brings their schemas up to date. It may run again after any
// interruption: a statement whose table or index exists is skipped by Temporal's own update task. It returns the number
// of history shards that the server has acquired before, zero in a new database.
func (stores databases) prepare(logger log.Logger) (shards int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), connectLimit)
	defer cancel()
	main, err := pgx.Connect(ctx, stores.url)
	if err != nil {
		return 0, err
	}
	defer main.Close(context.Background())
	if err := stores.prepareOne(main, stores.visibility, "postgresql/v12/visibility", logger); err != nil {
		return 0, err
	}
	if err := stores.prepareOne(main, stores.core, "postgresql/v12/temporal", logger); err != nil {
		return 0, err
	}
	options := main.Config()
	options.Database = stores.core.DatabaseName
	core, err := pgx.ConnectConfig(ctx, options)
	if err != nil {
		return 0, err
	}
	defer core.Close(context.Background())
	err = core.QueryRow(ctx, "SELECT count(*) FROM shards").Scan(&shards)
	return shards, err
}

func (stores databases) prepareOne(main *pgx.Conn, store *config.SQL, schemaName string, logger log.Logger) error {
	if err := createIfMissing(main, store.DatabaseName); err != nil {
		return fmt.Errorf("cannot create database %s (%w); create it by hand", store.DatabaseName, err)
	}
	connection, err := sql.NewConnection(store, logger)
	if err != nil {
		return err
	}
	defer connection.Close()
	database := plainIndexes{connection}
	if _, err := database.ReadSchemaVersion(); err != nil {
		setup := schema.NewSetupSchemaTask(database, &schema.SetupConfig{InitialVersion: "0.0"}, logger)
		if err := setup.Run(); err != nil {
			return fmt.Errorf("database %s: %w", store.DatabaseName, err)
		}
	}
	update := &schema.UpdateConfig{DBName: store.DatabaseName, SchemaName: schemaName}
	if err := schema.NewUpdateSchemaTask(database, update, logger).Run(); err != nil {
		return fmt.Errorf("database %s: %w", store.DatabaseName, err)
	}
	return nil
}

func createIfMissing(main *pgx.Conn, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), connectLimit)
	defer cancel()
	exists := false
	err := main.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name).Scan(&exists)
	if err != nil || exists {
		return err
	}
	_, err = main.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize())
	return err
}

// plainIndexes is a connection that runs Temporal's schema without the extension btree_gin, which the embedded Postgres
// does not bring. The extension lets an index of type GIN begin with namespace_id; without that column such an index
// still finds rows by the attribute's value.
type plainIndexes struct {
	*sql.Connection
}

func (database plainIndexes) Exec(statement string, arguments ...any) error {
	if strings.Contains(statement, "CREATE EXTENSION btree_gin") {
		return nil
	}
	statement = strings.ReplaceAll(statement, "USING GIN (namespace_id, ", "USING GIN (")
	return database.Connection.Exec(statement, arguments...)
}
