// kivik: logs in with the address, with Basic and with a cookie, and follows databases and documents.
package main

import (
	"context"
	"fmt"
	"log"
	"net/url"
	"os"
	"time"

	kivik "github.com/go-kivik/kivik/v4"
	"github.com/go-kivik/kivik/v4/couchdb"
)

// must ends the program if a call failed.
func must(err error) {
	if err != nil {
		log.Output(2, err.Error())
		os.Exit(1)
	}
}

// equal ends the program unless both values have the same text.
func equal(got, expected any) {
	if fmt.Sprint(got) != fmt.Sprint(expected) {
		log.Output(2, fmt.Sprintf("%v is not %v", got, expected))
		os.Exit(1)
	}
}

func main() {
	log.SetFlags(log.Lshortfile)
	address := os.Args[len(os.Args)-1]
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	open := func(address string, options ...kivik.Option) *kivik.Client {
		client, err := kivik.New("couch", address, options...)
		must(err)
		return client
	}

	stranger := open(address, couchdb.BasicAuth("anna", "wrong"))
	_, err := stranger.AllDBs(ctx)
	equal(kivik.HTTPStatus(err), 401)

	named, err := url.Parse(address)
	must(err)
	named.User = url.UserPassword("anna", "0123456789abcdef0123456789abcdef")
	for _, client := range []*kivik.Client{
		open(named.String()),
		open(address, couchdb.BasicAuth("anna", "0123456789abcdef0123456789abcdef")),
		open(address, couchdb.CookieAuth("anna", "0123456789abcdef0123456789abcdef")),
	} {
		follow(ctx, client)
	}
}

// follow creates and deletes a database, and expects to see exactly that.
func follow(ctx context.Context, client *kivik.Client) {
	session, err := client.Session(ctx)
	must(err)
	equal(session.Name, "anna")
	isUp, err := client.Ping(ctx)
	must(err)
	equal(isUp, true)
	_, err = client.Version(ctx)
	must(err)

	updatesOf := func(feed, since string) *kivik.DBUpdates {
		updates := client.DBUpdates(ctx, kivik.Params(map[string]any{"feed": feed, "since": since}))
		must(updates.Err())
		return updates
	}
	before := updatesOf("normal", "")
	for before.Next() {
	}
	since, err := before.LastSeq()
	must(err)
	must(client.CreateDB(ctx, "a/b"))
	// The client waits here for the first row, so the database was created before.
	updates := updatesOf("continuous", since)
	expect := func(kind string) {
		if !updates.Next() {
			must(fmt.Errorf("the feed has ended: %v", updates.Err()))
		}
		equal([]string{updates.DBName(), updates.Type()}, []string{"a/b", kind})
	}
	expect("created")
	exists, err := client.DBExists(ctx, "a/b")
	must(err)
	equal(exists, true)

	db := client.DB("a/b")
	rev, err := db.Put(ctx, "one", map[string]string{"color": "red"})
	must(err)
	expect("updated")
	changes := db.Changes(ctx, kivik.Param("include_docs", true))
	equal(changes.Next(), true)
	equal([]any{changes.ID(), changes.Changes(), changes.Deleted()}, []any{"one", []string{rev}, false})
	var doc map[string]string
	must(changes.ScanDoc(&doc))
	equal(doc["color"], "red")
	equal(changes.Next(), false)
	must(changes.Err())

	must(client.DestroyDB(ctx, "a/b"))
	expect("deleted")
	must(updates.Close())
	normal := updatesOf("normal", "")
	equal(normal.Next(), true)
	equal([]string{normal.DBName(), normal.Type()}, []string{"a/b", "deleted"})
	equal(normal.Next(), false)
	must(normal.Err())
}
