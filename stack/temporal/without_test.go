package main

import (
	"database/sql"
	"strings"
	"testing"

	"go.temporal.io/server/common/archiver/gcloud"
	"go.temporal.io/server/common/archiver/s3store"
	"go.temporal.io/server/common/config"
	"go.temporal.io/server/common/persistence/visibility/store/elasticsearch/client"
)

// What is left out refuses with a sentence that names it, where a configuration would use it first.
func TestWhatIsLeftOutRefuses(t *testing.T) {
	_, s3History := s3store.NewHistoryArchiver(nil, nil, nil, &config.S3Archiver{Region: "eu-west-1"})
	_, s3Visibility := s3store.NewVisibilityArchiver(nil, nil, &config.S3Archiver{Region: "eu-west-1"})
	_, gcsHistory := gcloud.NewHistoryArchiver(nil, nil, nil, &config.GstorageArchiver{})
	_, gcsVisibility := gcloud.NewVisibilityArchiver(nil, nil, &config.GstorageArchiver{})
	signing := client.ESAWSRequestSigningConfig{Enabled: true, Region: "eu-west-1", CredentialProvider: "environment"}
	_, fromEnvironment := client.NewAwsHttpClient(signing)
	signing.CredentialProvider = "aws-sdk-default"
	_, fromConfig := client.NewAwsHttpClient(signing)
	database, err := sql.Open("sqlite", ":memory:")
	if err == nil {
		err = database.Ping()
	}
	for name, refusal := range map[string]error{
		"AWS: history archive": s3History, "AWS: visibility archive": s3Visibility,
		"AWS: keys of the environment": fromEnvironment, "AWS: keys of a file": fromConfig,
		"Google Cloud Storage: history archive": gcsHistory, "Google Cloud Storage: visibility archive": gcsVisibility,
		"SQLite: database": err,
	} {
		what, _, _ := strings.Cut(name, ":")
		if refusal == nil || !strings.Contains(refusal.Error(), "this Temporal server is built without "+what+";") {
			t.Errorf("%s: %v", name, refusal)
		}
	}
}
