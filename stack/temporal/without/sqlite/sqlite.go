// Package sqlite refuses to open a database of SQLite.
package sqlite

import (
	"database/sql"
	"database/sql/driver"
	"errors"
)

type Error struct{ error }

func (Error) Code() int {
	return 0
}

type absent struct{}

func (absent) Open(string) (driver.Conn, error) {
	return nil, errors.New("this Temporal server is built without SQLite; use Postgres, or RATCHET_TEMPORAL=dev")
}

func init() {
	sql.Register("sqlite", absent{})
}
