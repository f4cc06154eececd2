package main

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/server/common/cluster"
	"go.temporal.io/server/common/config"
	"go.temporal.io/server/common/dynamicconfig"
	"go.temporal.io/server/common/log"
	"go.temporal.io/server/common/log/tag"
	"go.temporal.io/server/common/membership/static"
	"go.temporal.io/server/common/primitives"
	"go.temporal.io/server/temporal"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// historyShards is written into the database by the first start and cannot be changed later.
const historyShards = 16

// shardWrites is the number of workflows of one shard that are written at once; all share the connections.
const shardWrites = 8

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
	logger := log.NewZapLogger(log.BuildZapLogger(log.Config{Stdout: true, Level: "warn", Format: "console"}))
	stores, err := databasesOf(options.databaseURL)
	if err != nil {
		return err
	}
	for wait := firstWait; ; wait = min(2*wait, maxWait) {
		if err = stores.prepare(logger); err == nil {
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
		temporal.WithDynamicConfigClient(dynamicconfig.StaticClient{
			dynamicconfig.HistoryCacheHostLevelMaxSize.Key(): 8192,
			// A slow Postgres delays workflows and must not make shards lose track of what they have written.
			dynamicconfig.ShardIOConcurrency.Key():                           shardWrites,
			dynamicconfig.ShardIOTimeout.Key():                               time.Minute,
			dynamicconfig.FrontendMaxNamespaceVisibilityRPSPerInstance.Key(): 100,
			dynamicconfig.WorkflowPauseEnabled.Key():                         true,
		}),
		temporal.InterruptOn(temporal.InterruptCh()),
	)
	if err != nil {
		return err
	}
	go registerNamespace(options, logger)
	return server.Start()
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
