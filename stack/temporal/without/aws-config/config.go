// Package config refuses every use of AWS.
package config

import (
	"context"
	"errors"

	"github.com/aws/aws-sdk-go-v2/aws"
)

var errAbsent = errors.New("this Temporal server is built without AWS; set TEMPORAL_ADDRESS to one that has it")

type (
	LoadOptions struct{}

	EnvConfig struct {
		Credentials aws.Credentials
	}
)

func NewEnvConfig() (EnvConfig, error) {
	return EnvConfig{}, errAbsent
}

func LoadDefaultConfig(context.Context, ...LoadOptions) (aws.Config, error) {
	return aws.Config{}, errAbsent
}

func WithRegion(string) LoadOptions {
	return LoadOptions{}
}

func WithClientLogMode(aws.ClientLogMode) LoadOptions {
	return LoadOptions{}
}
