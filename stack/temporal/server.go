package main

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/server/client"
	"go.temporal.io/server/common/cluster"
	"go.temporal.io/server/common/config"
	"go.temporal.io/server/common/dynamicconfig"
	"go.temporal.io/server/common/log"
	"go.temporal.io/server/common/log/tag"
	"go.temporal.io/server/common/membership/static"
	"go.temporal.io/server/common/primitives"
	"go.temporal.io/server/temporal"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// The first start writes the number of history shards into the database; the server keeps it and ignores another one.
// Each shard polls its queues. `ioPerShard` commits of a shard may wait for the disk at once.
const (
	historyShards      = 4
	ioPerShard         = 4
	shardsOfPartitions = 16
)

// Lines with the same message: so many within the interval are written, and the others are dropped.
const (
	sameLines         = 5
	sameLinesInterval = time.Minute
)

const (
	firstWait = 200 * time.Millisecond
	maxWait   = 5 * time.Second
)

// The services in the order of -ports.
var services = [4]primitives.ServiceName{
	primitives.FrontendService, primitives.HistoryService, primitives.MatchingService, primitives.WorkerService,
}

type serveOptions struct {
	databaseURL   string
	namespace     string
	retentionDays int
	ports         [4]int
}

// serve runs all services in this process until SIGINT or SIGTERM. It waits for Postgres as long as that takes.
func serve(options serveOptions) error {
	full := log.BuildZapLogger(log.Config{Stdout: true, Level: "warn", Format: "console"})
	logger := log.NewZapLogger(quiet(full))
	stores, err := databasesOf(options.databaseURL)
	if err != nil {
		return err
	}
	shards := 0
	for wait := firstWait; ; wait = min(2*wait, maxWait) {
		if shards, err = stores.prepare(logger); err == nil {
			break
		}
		logger.Warn("waiting for Postgres", tag.Error(err))
		time.Sleep(wait)
	}
	configuration := configurationOf(options, stores)
	hosts := map[primitives.ServiceName]static.Hosts{}
	for index, service := range services {
		hosts[service] = static.SingleLocalHost(address(options.ports[index]))
	}
	server, err := temporal.NewServer(
		temporal.WithConfig(configuration),
		temporal.ForServices(temporal.DefaultServices),
		temporal.WithStaticHosts(hosts),
		temporal.WithLogger(logger),
		temporal.WithDynamicConfigClient(dynamicConfig(shards)),
		temporal.WithClientFactoryProvider(patientClients{client.NewFactoryProvider()}),
		temporal.InterruptOn(temporal.InterruptCh()),
	)
	if err != nil {
		return err
	}
	go registerNamespace(options, logger)
	return server.Start()
}

// quiet drops repeated lines and stack traces: a server whose Postgres is away or slow repeats the same errors for each
// shard and poller.
func quiet(full *zap.Logger) *zap.Logger {
	return full.WithOptions(
		zap.AddStacktrace(zap.FatalLevel),
		zap.WrapCore(func(core zapcore.Core) zapcore.Core {
			return zapcore.NewSamplerWithOptions(core, sameLinesInterval, sameLines, 0)
		}),
	)
}

// dynamicConfig returns the settings for a store with so many shards, none for a new one. Older stores have 16, and may
// have tasks that wait in four partitions of a queue; one partition needs no forwarding between them.
func dynamicConfig(shards int) dynamicconfig.StaticClient {
	settings := dynamicconfig.StaticClient{
		dynamicconfig.HistoryCacheHostLevelMaxSize.Key():                  8192,
		dynamicconfig.FrontendMaxNamespaceVisibilityRPSPerInstance.Key():  100,
		dynamicconfig.WorkflowPauseEnabled.Key():                          true,
		dynamicconfig.WorkerScannerMaxConcurrentActivityTaskPollers.Key(): 1,
		dynamicconfig.ShardIOConcurrency.Key():                            ioPerShard,
		// After a time-out a shard loads its state anew, which a slow Postgres makes slower.
		dynamicconfig.ShardIOTimeout.Key(): time.Minute,
	}
	if shards != shardsOfPartitions {
		settings[dynamicconfig.MatchingNumTaskqueueReadPartitions.Key()] = 1
		settings[dynamicconfig.MatchingNumTaskqueueWritePartitions.Key()] = 1
	}
	return settings
}

func address(port int) string {
	return net.JoinHostPort(loopback, strconv.Itoa(port))
}

func configurationOf(options serveOptions, stores databases) *config.Config {
	frontend := address(options.ports[0])
	configuration := &config.Config{
		Persistence: config.Persistence{
			DefaultStore:     "core",
			VisibilityStore:  "visibility",
			NumHistoryShards: historyShards,
			DataStores: map[string]config.DataStore{
				"core":       {SQL: stores.core},
				"visibility": {SQL: stores.visibility},
			},
		},
		ClusterMetadata: &cluster.Config{
			FailoverVersionIncrement: 10,
			MasterClusterName:        "active",
			CurrentClusterName:       "active",
			ClusterInformation: map[string]cluster.ClusterInformation{
				"active": {Enabled: true, InitialFailoverVersion: 1, RPCAddress: frontend},
			},
		},
		DCRedirectionPolicy: config.DCRedirectionPolicy{Policy: "noop"},
		PublicClient:        config.PublicClient{HostPort: frontend},
		Services:            map[string]config.Service{},
	}
	configuration.Global.Membership.MaxJoinDuration = 30 * time.Second
	configuration.Global.Membership.BroadcastAddress = loopback
	configuration.Archival.History.State = "disabled"
	configuration.Archival.Visibility.State = "disabled"
	configuration.NamespaceDefaults.Archival.History.State = "disabled"
	configuration.NamespaceDefaults.Archival.Visibility.State = "disabled"
	for index, service := range services {
		configuration.Services[string(service)] = config.Service{
			RPC: config.RPC{GRPCPort: options.ports[index], BindOnIP: loopback},
		}
	}
	return configuration
}

// registerNamespace creates the namespace once the frontend answers. An existing one is left as it is.
func registerNamespace(options serveOptions, logger log.Logger) {
	connection, err := grpc.NewClient(
		address(options.ports[0]), grpc.WithTransportCredentials(insecure.NewCredentials()),
	)
	if err != nil {
		fail(fmt.Errorf("namespace %s: %w", options.namespace, err))
	}
	defer connection.Close()
	client := workflowservice.NewWorkflowServiceClient(connection)
	request := &workflowservice.RegisterNamespaceRequest{
		Namespace:                        options.namespace,
		WorkflowExecutionRetentionPeriod: durationpb.New(time.Duration(options.retentionDays) * 24 * time.Hour),
	}
	for wait := firstWait; ; wait = min(2*wait, maxWait) {
		ctx, cancel := context.WithTimeout(context.Background(), maxWait)
		_, err := client.RegisterNamespace(ctx, request)
		cancel()
		if err == nil || status.Code(err) == codes.AlreadyExists {
			return
		}
		logger.Warn("namespace is not registered yet", tag.Error(err))
		time.Sleep(wait)
	}
}
