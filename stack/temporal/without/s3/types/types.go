// Package types has the errors of S3.
package types

type (
	NoSuchBucket struct{ error }

	NoSuchKey struct{ error }
)
