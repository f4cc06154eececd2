// Package client answers as Temporal's scaled workers do where no version has any, and refuses to make some.
package client

import (
	"context"

	deploymentpb "go.temporal.io/api/deployment/v1"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/auto-scaled-workers/wci/workflow/iface"
	"go.temporal.io/server/common/namespace"
	"go.uber.org/fx"
)

var Module = fx.Provide(func() Client { return Client{} })

var errAbsent = serviceerror.NewInvalidArgument(
	"a compute config: this server is built without scaled workers; set TEMPORAL_ADDRESS to one that has them",
)

type (
	Client struct{}

	Instance struct {
		Spec             *iface.WorkerControllerInstanceSpec
		ValidationStatus *iface.ValidationStatus
	}
)

func (Client) DescribeWorkerControllerInstance(
	context.Context, *namespace.Namespace, *deploymentpb.WorkerDeploymentVersion,
) (*Instance, []byte, error) {
	return nil, nil, serviceerror.NewNotFound("this version has no scaled workers")
}

func (Client) UpdateWorkerControllerInstance(
	context.Context, *namespace.Namespace, *deploymentpb.WorkerDeploymentVersion, []byte, string,
	map[string]iface.ScalingGroupSpecUpdate, []string,
) (*Instance, error) {
	return nil, errAbsent
}

func (Client) ValidateWorkerControllerInstanceSpec(
	context.Context, *namespace.Namespace, *deploymentpb.WorkerDeploymentVersion, string,
	map[string]iface.ScalingGroupSpecUpdate, []string,
) error {
	return errAbsent
}

func (Client) DeleteWorkerControllerInstance(
	context.Context, *namespace.Namespace, *deploymentpb.WorkerDeploymentVersion, string,
) error {
	return nil
}
