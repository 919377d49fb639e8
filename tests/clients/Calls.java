import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;

/** The JDK's client with its defaults, which offers an upgrade to HTTP/2. Prints the answers. */
class Calls {
    public static void main(String[] urls) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        URI labels = URI.create(urls[3] + "/");
        HttpRequest ping = HttpRequest.newBuilder(labels.resolve("ping")).build();
        System.out.println(client.send(ping, BodyHandlers.ofString()).statusCode());
        HttpRequest text = HttpRequest.newBuilder(labels.resolve("invocations"))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString("{\"inputs\": \"the film was good\"}"))
                .build();
        System.out.println(client.send(text, BodyHandlers.ofString()).body());
    }
}
