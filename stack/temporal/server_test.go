package main

import (
	"fmt"
	"testing"

	"go.temporal.io/server/common/dynamicconfig"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

func TestTheSameErrorIsWrittenAFewTimesAMinuteAndWithoutAStack(t *testing.T) {
	core, written := observer.New(zapcore.WarnLevel)
	logger := quiet(zap.New(core, zap.AddStacktrace(zapcore.ErrorLevel)))
	for number := range 1000 {
		logger.Error("Unable to call matching.PollActivityTaskQueue.", zap.Int("number", number))
	}
	logger.Error("another error")
	if written.Len() != sameLines+1 {
		t.Errorf("%d lines were written", written.Len())
	}
	for _, line := range written.All() {
		if line.Stack != "" {
			t.Error(fmt.Sprintf("a stack trace: %s", line.Stack))
		}
	}
}

func TestStoresOfOtherVersionsKeepTheirPartitions(t *testing.T) {
	for shards, isOne := range map[int]bool{0: true, historyShards: true, shardsOfPartitions: false} {
		_, found := dynamicConfig(shards)[dynamicconfig.MatchingNumTaskqueueReadPartitions.Key()]
		if found != isOne {
			t.Errorf("one partition with %d shards: %v", shards, found)
		}
	}
}
