// Package storage refuses every use of Google Cloud Storage.
package storage

import (
	"context"
	"errors"
	"io"

	"google.golang.org/api/option"
)

const ScopeFullControl = ""

var errAbsent = errors.New(
	"this Temporal server is built without Google Cloud Storage; set TEMPORAL_ADDRESS to one that has it",
)

type (
	Client struct{}

	BucketHandle struct{}

	ObjectHandle struct{}

	BucketAttrs struct{}

	ObjectAttrs struct{ Name string }

	ObjectIterator struct{}

	Query struct{ Prefix string }

	Reader struct{ io.ReadCloser }

	Writer struct{ io.WriteCloser }
)

func NewClient(context.Context, ...option.ClientOption) (*Client, error) {
	return nil, errAbsent
}

func (*Client) Bucket(string) *BucketHandle {
	return nil
}

func (*BucketHandle) Attrs(context.Context) (*BucketAttrs, error) {
	return nil, errAbsent
}

func (*BucketHandle) Object(string) *ObjectHandle {
	return nil
}

func (*BucketHandle) Objects(context.Context, *Query) *ObjectIterator {
	return nil
}

func (*ObjectIterator) Next() (*ObjectAttrs, error) {
	return nil, errAbsent
}

func (*ObjectHandle) Attrs(context.Context) (*ObjectAttrs, error) {
	return nil, errAbsent
}

func (*ObjectHandle) NewReader(context.Context) (*Reader, error) {
	return nil, errAbsent
}

func (*ObjectHandle) NewWriter(context.Context) *Writer {
	return nil
}

func (*Writer) CloseWithError(error) error {
	return errAbsent
}
