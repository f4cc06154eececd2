// Package s3 refuses every call. No client is made, because the empty module of AWS's config refuses first.
package s3

import (
	"context"
	"errors"
	"io"

	"github.com/aws/aws-sdk-go-v2/aws"
)

type (
	Client struct{}

	Options struct {
		BaseEndpoint *string
		UsePathStyle bool
	}

	HeadBucketInput struct{ Bucket *string }

	HeadBucketOutput struct{}

	HeadObjectInput struct{ Bucket, Key *string }

	HeadObjectOutput struct{}

	PutObjectInput struct {
		Bucket, Key *string
		Body        io.Reader
	}

	PutObjectOutput struct{}

	GetObjectInput struct{ Bucket, Key *string }

	GetObjectOutput struct{ Body io.ReadCloser }

	ListObjectsV2Input struct {
		Bucket, Prefix, Delimiter, ContinuationToken *string
		MaxKeys                                      *int32
	}

	ListObjectsV2Output struct {
		CommonPrefixes        []struct{ Prefix *string }
		Contents              []struct{ Key *string }
		IsTruncated           *bool
		NextContinuationToken *string
	}
)

func NewFromConfig(aws.Config, ...func(*Options)) *Client {
	return &Client{}
}

func (*Client) HeadBucket(context.Context, *HeadBucketInput, ...func(*Options)) (*HeadBucketOutput, error) {
	return nil, errors.ErrUnsupported
}

func (*Client) HeadObject(context.Context, *HeadObjectInput, ...func(*Options)) (*HeadObjectOutput, error) {
	return nil, errors.ErrUnsupported
}

func (*Client) PutObject(context.Context, *PutObjectInput, ...func(*Options)) (*PutObjectOutput, error) {
	return nil, errors.ErrUnsupported
}

func (*Client) GetObject(context.Context, *GetObjectInput, ...func(*Options)) (*GetObjectOutput, error) {
	return nil, errors.ErrUnsupported
}

func (*Client) ListObjectsV2(context.Context, *ListObjectsV2Input, ...func(*Options)) (*ListObjectsV2Output, error) {
	return nil, errors.ErrUnsupported
}
