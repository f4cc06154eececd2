package main

import (
	"context"
	"errors"
	"time"

	"go.temporal.io/server/api/historyservice/v1"
	"go.temporal.io/server/client"
	"go.temporal.io/server/common"
	"go.temporal.io/server/common/dynamicconfig"
	"go.temporal.io/server/common/log"
	"go.temporal.io/server/common/membership"
	"go.temporal.io/server/common/metrics"
	"go.temporal.io/server/common/testing/testhooks"
	"google.golang.org/grpc"
)

// Matching asks History to note that a worker starts a task, and forgets the answer after one second, or ten. History
// may have noted it by then: no worker hears of the start, and the task is lost until its time-out
// (temporalio/temporal#11733). On a busy machine a start takes seconds. Here Matching waits as long as for History's
// other answers, which the client limits: 30 s.

// patientClients makes the server's clients. Those of History wait for the start of a task.
type patientClients struct{ client.FactoryProvider }

func (clients patientClients) NewFactory(
	connections common.RPCFactory, monitor membership.Monitor, handler metrics.Handler, settings *dynamicconfig.Collection,
	hooks testhooks.TestHooks, shards int32, logger log.Logger, throttled log.Logger,
) client.Factory {
	return patientFactory{
		clients.FactoryProvider.NewFactory(connections, monitor, handler, settings, hooks, shards, logger, throttled),
	}
}

type patientFactory struct{ client.Factory }

func (factory patientFactory) NewHistoryClientWithTimeout(
	timeout time.Duration,
) (historyservice.HistoryServiceClient, error) {
	made, err := factory.Factory.NewHistoryClientWithTimeout(timeout)
	return patientHistory{made}, err
}

type patientHistory struct {
	historyservice.HistoryServiceClient
}

func (history patientHistory) RecordActivityTaskStarted(
	ctx context.Context, request *historyservice.RecordActivityTaskStartedRequest, options ...grpc.CallOption,
) (*historyservice.RecordActivityTaskStartedResponse, error) {
	ctx, cancel := patient(ctx)
	defer cancel()
	return history.HistoryServiceClient.RecordActivityTaskStarted(ctx, request, options...)
}

func (history patientHistory) RecordWorkflowTaskStarted(
	ctx context.Context, request *historyservice.RecordWorkflowTaskStartedRequest, options ...grpc.CallOption,
) (*historyservice.RecordWorkflowTaskStartedResponse, error) {
	ctx, cancel := patient(ctx)
	defer cancel()
	return history.HistoryServiceClient.RecordWorkflowTaskStarted(ctx, request, options...)
}

// patient returns a context without the deadline of ctx, which ends if the worker's poll is cancelled before it.
func patient(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			cancel()
		}
	})
	return longer, func() { stop(); cancel() }
}
